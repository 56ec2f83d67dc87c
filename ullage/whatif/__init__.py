"""What-if studies: one request with fields varied by name, every point planned anew."""
