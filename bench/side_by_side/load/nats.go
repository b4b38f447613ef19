package main

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const waitS = 300 * time.Second

// natsClient uses JetStream with the file store. A work queue is a stream that deletes acknowledged messages.
type natsClient struct {
	js     jetstream.JetStream
	stream jetstream.Stream
	failed chan error
}

func newNATS(j job) (client, error) {
	connection, err := nats.Connect("nats://" + j.address)
	if err != nil {
		return nil, err
	}
	failed := make(chan error, 1)
	note := func(_ jetstream.JetStream, _ *nats.Msg, err error) {
		select {
		case failed <- err:
		default:
		}
	}
	js, err := jetstream.New(
		connection, jetstream.WithPublishAsyncMaxPending(j.window), jetstream.WithPublishAsyncErrHandler(note),
	)
	if err != nil {
		return nil, err
	}
	settings := jetstream.StreamConfig{Name: j.topic, Subjects: []string{j.topic}, Storage: jetstream.FileStorage}
	if j.kind == "queue" {
		settings.Retention = jetstream.WorkQueuePolicy
	}
	ctx, cancel := context.WithTimeout(context.Background(), waitS)
	defer cancel()
	stream, err := js.CreateOrUpdateStream(ctx, settings)
	return &natsClient{js, stream, failed}, err
}

func (c *natsClient) publish(j job) error {
	body := make([]byte, j.size)
	// The library's own limit for a full window is 200 ms. A loaded disk takes longer.
	stall := jetstream.WithStallWait(waitS)
	for range j.count {
		if _, err := c.js.PublishAsync(j.topic, body, stall); err != nil {
			return err
		}
	}
	select {
	case <-c.js.PublishAsyncComplete():
	case <-time.After(waitS):
		return context.DeadlineExceeded
	}
	select {
	case err := <-c.failed:
		return err
	default:
		return nil
	}
}

func (c *natsClient) consume(j job, first func()) error {
	ctx, cancel := context.WithTimeout(context.Background(), waitS)
	defer cancel()
	consumer, err := c.consumer(ctx, j)
	if err != nil {
		return err
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(j.window))
	if err != nil {
		return err
	}
	defer messages.Stop()
	for at := range j.count {
		message, err := messages.Next()
		if err != nil {
			return err
		}
		if at == 0 {
			first()
		}
		switch {
		case j.kind == "stream":
		case at == j.count-1:
			// The server has handled every acknowledgement when it answers the last one.
			err = message.DoubleAck(ctx)
		case j.kind == "queue" || (at+1)%max(1, j.window/2) == 0:
			err = message.Ack()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *natsClient) consumer(ctx context.Context, j job) (jetstream.Consumer, error) {
	if j.kind == "stream" {
		return c.stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	}
	// A work queue accepts only single acknowledgements. A group acknowledges all before a message, as in AMQP.
	settings := jetstream.ConsumerConfig{
		Durable: j.group, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: j.window, AckWait: waitS,
	}
	if j.kind == "group" {
		settings.AckPolicy = jetstream.AckAllPolicy
	}
	return c.stream.CreateOrUpdateConsumer(ctx, settings)
}
