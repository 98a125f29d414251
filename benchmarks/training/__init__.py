"""Many runs to the end: which, in what order, one after the other, and the tables made of them."""
