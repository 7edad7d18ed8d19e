"""What a step sends: counted from the program that runs, and closed formulas of each axis of a layout."""
