"""What is here: blocks, their heat and labels, and whether their bytes are right."""
