"""What a trained U-Net is worth: samples, scores, and its way to and from diffusers."""
