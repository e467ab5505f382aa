"""What happens when something goes wrong."""
