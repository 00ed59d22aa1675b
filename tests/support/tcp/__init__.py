"""Certificates, peers and middleboxes for TCP links."""
