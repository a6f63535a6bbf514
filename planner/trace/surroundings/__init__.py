"""What a model finds around it while it is traced: answers, refusals, and notes of what it does."""
