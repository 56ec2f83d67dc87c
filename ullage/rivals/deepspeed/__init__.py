"""Configuration files of DeepSpeed: the request that one stands for, and the one nearest to a plan."""
