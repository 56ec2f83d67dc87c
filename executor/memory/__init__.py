"""Where tensors are: memory taken once, state and gradients of every parameter, activations, files on NVMe."""
