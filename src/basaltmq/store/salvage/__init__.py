"""Reads a damaged database past its damage, names the losses, and builds a healthy database from the rest.

files        the files of a database, and the fault of each
views        read-only databases over links to those files, each without some of the SST files
reading      the rows of a family, and the key ranges that could not be read
losses       those ranges, and the damaged parts of the WAL
write_batch  the rows that a damaged WAL record changed
naming       losses as operators know them: queue, message id, topic, object
survey       all of the above for one database
copying      copies the rows into a new database
swap         replaces the old database with the new one and moves the old one to quarantine
verify       checks every file and row of a store
repair       makes a damaged store open again
unreadable   skips and records unreadable rows of an open store
"""
