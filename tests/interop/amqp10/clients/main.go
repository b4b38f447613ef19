// go-amqp: a dynamic node, ten messages, and their outcomes. Prints what it saw.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	amqp "github.com/Azure/go-amqp"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	options := &amqp.ConnOptions{SASLType: amqp.SASLTypePlain("guest", "guest")}
	conn := must(amqp.Dial(ctx, "amqp://127.0.0.1:"+os.Args[1], options))
	session := must(conn.NewSession(ctx, nil))
	receiver := must(session.NewReceiver(ctx, "", &amqp.ReceiverOptions{DynamicAddress: true, Credit: 10}))
	sender := must(session.NewSender(ctx, receiver.Address(), nil))
	for number := 0; number < 10; number++ {
		message := amqp.NewMessage([]byte(fmt.Sprintf("m%d", number)))
		if err := sender.Send(ctx, message, nil); err != nil {
			panic(err)
		}
	}
	for number := 0; number < 10; number++ {
		message := must(receiver.Receive(ctx, nil))
		if err := receiver.AcceptMessage(ctx, message); err != nil {
			panic(err)
		}
		fmt.Print(string(message.GetData()), " ")
	}
	fmt.Println()
	if err := conn.Close(); err != nil {
		panic(err)
	}
}
