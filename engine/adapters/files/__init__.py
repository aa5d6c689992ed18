"""An adapter's directory, opened safely, and the readers of its weight formats."""
