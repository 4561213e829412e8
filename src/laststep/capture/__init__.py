"""Copy the live state into memory that training does not touch, while training goes on."""
