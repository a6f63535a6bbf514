"""What an emitted script imports when it runs; imports none of the other parts."""
