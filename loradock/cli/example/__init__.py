"""The tiny example for first steps with an installed LoRADock."""
