"""A configuration file of DeepSpeed, and the request that it stands for."""
