"""An autoencoder's method and a budget → the same numbers, made strip by strip of rows; never knows whose it is."""
