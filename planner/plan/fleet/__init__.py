"""How many devices a training is worth: the plans for several numbers of them, and the choice."""
