"""How a run goes on: resumed by its user, restarted by itself, or planned smaller after it ran out of memory."""
