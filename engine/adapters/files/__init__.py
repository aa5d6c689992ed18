"""An adapter's directory, opened safely, and the readers of the weights formats."""
