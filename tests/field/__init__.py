"""The field trial: models that nobody here wrote, through the front door."""
