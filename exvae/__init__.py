"""The Exemplar VAE: a VAE whose prior is a Parzen window over latent means of training images."""
