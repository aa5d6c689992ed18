"""The weights of a saved model: what is read of its files, and how far loading has come."""
