"""What commands print: help pages, and tables for the width of a terminal."""
