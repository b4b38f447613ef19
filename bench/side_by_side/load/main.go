// One client of a peer as a program. It publishes or consumes COUNT messages and prints "ROLE COUNT SECONDS RATE".
//
//	load nats|redis ADDRESS pub|sub queue|stream|group:NAME TOPIC COUNT SIZE WINDOW
//
// A publisher has at most WINDOW messages without an answer. What a consumer does depends on the kind:
//   - queue: at most WINDOW messages without an acknowledgement; an acknowledged message leaves the broker
//   - group:NAME: the same, but the message stays for other groups
//   - stream: reads from the first message, without acknowledgements
//
// A consumer's clock starts at its first message, because it is started before the publisher.
package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

type job struct {
	address, kind, group, topic string
	count, size, window         int
}

type client interface {
	publish(job) error
	// consume calls first when the first message has arrived.
	consume(j job, first func()) error
}

func main() {
	if len(os.Args) != 9 {
		fail(fmt.Errorf("usage: load nats|redis ADDRESS pub|sub queue|stream|group:NAME TOPIC COUNT SIZE WINDOW"))
	}
	protocol, role := os.Args[1], os.Args[3]
	kind, group, _ := strings.Cut(os.Args[4], ":")
	if group == "" {
		group = "queue"
	}
	j := job{os.Args[2], kind, group, os.Args[5], number(os.Args[6]), number(os.Args[7]), number(os.Args[8])}
	var peer client
	var err error
	switch protocol {
	case "nats":
		peer, err = newNATS(j)
	case "redis":
		peer, err = newRedis(j)
	default:
		err = fmt.Errorf("no protocol %q; use nats or redis", protocol)
	}
	if err != nil {
		fail(err)
	}
	begin := time.Now()
	switch role {
	case "pub":
		err = peer.publish(j)
	case "sub":
		err = peer.consume(j, func() { begin = time.Now() })
	default:
		err = fmt.Errorf("no role %q; use pub or sub", role)
	}
	if err != nil {
		fail(err)
	}
	seconds := time.Since(begin).Seconds()
	fmt.Printf("%s %d %.3f %.0f\n", role, j.count, seconds, float64(j.count)/seconds)
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	if err != nil || value < 1 {
		fail(fmt.Errorf("%q is not a positive number", text))
	}
	return value
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}
