"""The one model class and the families it runs."""
