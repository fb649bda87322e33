"""Workers: who they are, what they tell, what they are told."""
