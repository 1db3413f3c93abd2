"""Tables and figures made from the stored results."""
