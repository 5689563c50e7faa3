"""The types handed from station to station: requests, steps, sampling parameters, messages and errors.

in: nothing. out: plain data. never: torch, I/O, or knowledge of any station.
"""
