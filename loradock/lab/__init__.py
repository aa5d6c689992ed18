"""What other settings would have done: simulations of a log's traffic."""
