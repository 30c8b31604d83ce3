"""A campaign of random faults against elastic jobs; ``scripts/faults`` runs it."""
