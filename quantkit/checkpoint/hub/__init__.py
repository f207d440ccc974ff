"""Query the hub; every answer is checked before it is used."""
