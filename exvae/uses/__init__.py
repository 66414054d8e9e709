"""What a trained model is good for: new images, representations, data augmentation."""
