"""What others have around training: their metrics, launchers, trainers, and configurations."""
