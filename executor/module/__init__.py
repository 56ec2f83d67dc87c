"""What touches the user's ``nn.Module``: units found in it, hooks, guards, weights shown and hidden, gradients."""
