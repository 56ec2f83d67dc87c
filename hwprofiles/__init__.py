"""What a machine can do: schema, built-in data, calibration. Imports nothing else of ours."""
