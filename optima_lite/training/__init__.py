"""Training: encode and audit the data, the losses, and the runs on transformers' Trainer."""
