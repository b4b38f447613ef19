"""Reading a damaged database past its damage, naming what is lost, and building a healthy database from the rest.

files      what is in the directory of a database, and what is wrong with each file
views      read-only databases over links to those files, each without some of the tables
reading    the rows of a family, with the key ranges that could not be read
naming     those ranges in the words of an operator: queue, message id, topic, object
copying    the rows into a new database
swap       the new database in the place of the old one, which goes to quarantine
"""
