"""Options of training, a folder each; ``toolkit/rooms.py`` finds them. Nothing else imports them."""
