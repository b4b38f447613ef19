"""RocketMQ 5 listener: clients of the gRPC protocol apache.rocketmq.v2 on the stream plane."""
