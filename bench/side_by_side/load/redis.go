package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// redisClient sends Redis Streams commands in pipelines. It holds the part of RESP that these commands use.
type redisClient struct {
	in  *bufio.Reader
	out *bufio.Writer
}

func newRedis(j job) (client, error) {
	connection, err := net.Dial("tcp", j.address)
	if err != nil {
		return nil, err
	}
	c := &redisClient{bufio.NewReaderSize(connection, 1<<18), bufio.NewWriterSize(connection, 1<<18)}
	if j.kind == "stream" {
		return c, nil
	}
	// Both roles create the group of a work queue, as in AMQP both declare the queue.
	c.send("XGROUP", "CREATE", j.topic, j.group, "0", "MKSTREAM")
	if _, err = c.receive(); err != nil && strings.HasPrefix(err.Error(), "BUSYGROUP") {
		err = nil
	}
	return c, err
}

func (c *redisClient) publish(j job) error {
	body := string(make([]byte, j.size))
	sent, answered := 0, 0
	for answered < j.count {
		for sent < j.count && sent-answered < j.window {
			c.send("XADD", j.topic, "*", "b", body)
			sent++
		}
		if err := c.out.Flush(); err != nil {
			return err
		}
		for more := true; more; more = answered < sent && c.in.Buffered() > 0 {
			if _, err := c.receive(); err != nil {
				return err
			}
			answered++
		}
	}
	return nil
}

func (c *redisClient) consume(j job, first func()) error {
	read := []string{"XREAD", "COUNT", strconv.Itoa(j.window), "BLOCK", "1000", "STREAMS", j.topic, "0"}
	if j.kind != "stream" {
		// Half a window per read: acknowledgements come as often as those of the AMQP load.
		half := strconv.Itoa(max(1, j.window/2))
		read = []string{"XREADGROUP", "GROUP", j.group, "one", "COUNT", half, "BLOCK", "1000", "STREAMS", j.topic, ">"}
	}
	settles := 0
	for seen := 0; seen < j.count; {
		c.send(read...)
		if err := c.out.Flush(); err != nil {
			return err
		}
		if err := c.skip(settles); err != nil {
			return err
		}
		settles = 0
		ids, err := c.ids()
		if err != nil {
			return err
		}
		if len(ids) == 0 {
			continue
		}
		if seen == 0 {
			first()
		}
		seen += len(ids)
		switch j.kind {
		case "stream":
			read[len(read)-1] = ids[len(ids)-1]
		case "queue":
			c.send(append([]string{"XDEL", j.topic}, ids...)...)
			settles++
			fallthrough
		case "group":
			c.send(append([]string{"XACK", j.topic, j.group}, ids...)...)
			settles++
		}
	}
	if err := c.out.Flush(); err != nil {
		return err
	}
	return c.skip(settles)
}

func (c *redisClient) skip(answers int) error {
	for range answers {
		if _, err := c.receive(); err != nil {
			return err
		}
	}
	return nil
}

// ids returns those of the entries in an answer to XREAD: [[topic, [[id, [field, value]], ...]]], or nil.
func (c *redisClient) ids() ([]string, error) {
	answer, err := c.receive()
	if err != nil || answer == nil {
		return nil, err
	}
	entries := answer.([]any)[0].([]any)[1].([]any)
	ids := make([]string, len(entries))
	for at, entry := range entries {
		ids[at] = entry.([]any)[0].(string)
	}
	return ids, nil
}

func (c *redisClient) send(words ...string) {
	// A failed write is kept by the buffer, and Flush returns it.
	c.head('*', len(words))
	for _, word := range words {
		c.head('$', len(word))
		c.out.WriteString(word)
		c.out.WriteString("\r\n")
	}
}

func (c *redisClient) head(kind byte, length int) {
	c.out.WriteByte(kind)
	c.out.Write(strconv.AppendInt(c.out.AvailableBuffer(), int64(length), 10))
	c.out.WriteString("\r\n")
}

// receive returns a string, an []any or nil.
func (c *redisClient) receive() (any, error) {
	if c.in.Buffered() == 0 {
		if err := c.out.Flush(); err != nil {
			return nil, err
		}
	}
	line, err := c.in.ReadString('\n')
	if err != nil {
		return nil, err
	}
	kind, rest := line[0], strings.TrimRight(line[1:], "\r\n")
	if kind == '+' || kind == ':' {
		return rest, nil
	}
	if kind == '-' {
		return nil, errors.New(rest)
	}
	size, err := strconv.Atoi(rest)
	if err != nil || (kind != '$' && kind != '*') {
		return nil, fmt.Errorf("unexpected answer %q", line)
	}
	if size < 0 {
		return nil, nil
	}
	if kind == '$' {
		text := make([]byte, size+2)
		for got := 0; got < len(text); {
			read, err := c.in.Read(text[got:])
			if err != nil {
				return nil, err
			}
			got += read
		}
		return string(text[:size]), nil
	}
	items := make([]any, size)
	for at := range items {
		if items[at], err = c.receive(); err != nil {
			return nil, err
		}
	}
	return items, nil
}
