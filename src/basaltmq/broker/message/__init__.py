"""Parts of an AMQP message: properties, header tables, death history, stream records."""
