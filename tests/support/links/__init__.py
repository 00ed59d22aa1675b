"""Suites and harnesses for links and regions over every transport."""
