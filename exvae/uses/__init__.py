"""Applications of a trained model: new images, representations, data augmentation."""
