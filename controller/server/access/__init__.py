"""Which processes and keys reach the controller, and what each of them may do."""
