// The load of the bench amqp10: one connection that publishes durable messages with a window, and one that consumes them.
//
//	amqp10_load PORT QUEUE COUNT SIZE WINDOW
//
// Prints JSON: messages per second until the last one is accepted at both ends, and the time until delivery in ms.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	amqp "github.com/Azure/go-amqp"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func open(ctx context.Context) *amqp.Session {
	// Broker-J has a virtual host of this name; the others take any.
	options := &amqp.ConnOptions{SASLType: amqp.SASLTypePlain("guest", "guest"), HostName: "default"}
	connection := must(amqp.Dial(ctx, "amqp://127.0.0.1:"+os.Args[1], options))
	return must(connection.NewSession(ctx, nil))
}

func publish(ctx context.Context, queue string, count, size, window int) {
	options := &amqp.SenderOptions{TargetCapabilities: []string{"queue"}}
	sender := must(open(ctx).NewSender(ctx, queue, options))
	left := make(chan struct{}, count)
	for range count {
		left <- struct{}{}
	}
	close(left)
	var workers sync.WaitGroup
	for range window {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for range left {
				body := make([]byte, size)
				binary.BigEndian.PutUint64(body, uint64(time.Now().UnixNano()))
				message := amqp.NewMessage(body)
				message.Header = &amqp.MessageHeader{Durable: true}
				if err := sender.Send(ctx, message, nil); err != nil {
					panic(err)
				}
			}
		}()
	}
	workers.Wait()
}

func main() {
	queue := os.Args[2]
	count, size, window := must(strconv.Atoi(os.Args[3])), must(strconv.Atoi(os.Args[4])), must(strconv.Atoi(os.Args[5]))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	options := &amqp.ReceiverOptions{Credit: int32(window), SourceCapabilities: []string{"queue"}}
	receiver := must(open(ctx).NewReceiver(ctx, queue, options))
	begin := time.Now()
	published := make(chan struct{})
	go func() {
		publish(ctx, queue, count, size, window)
		close(published)
	}()
	delays := make([]float64, 0, count)
	for range count {
		message := must(receiver.Receive(ctx, nil))
		sent := int64(binary.BigEndian.Uint64(message.GetData()))
		delays = append(delays, float64(time.Now().UnixNano()-sent)/1e6)
		if err := receiver.AcceptMessage(ctx, message); err != nil {
			panic(err)
		}
	}
	<-published
	seconds := time.Since(begin).Seconds()
	slices.Sort(delays)
	json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"rate": float64(count) / seconds, "p50_ms": delays[count/2], "p99_ms": delays[count*99/100],
	})
}
