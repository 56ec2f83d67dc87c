"""Everything that touches the user's ``nn.Module``: binding units, hooks, guards, visibility of weights, gradients."""
