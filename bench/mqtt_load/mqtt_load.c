/* Load on an MQTT broker: one thread, epoll, MQTT 3.1.1.
 *
 *     mqtt_load PORT NAME=VALUE...
 *
 * Subscribers connect first, then publishers. Every publisher has at most `window` messages that are not acknowledged
 * (QoS 1) or not delivered to all subscribers (QoS 0). The program prints one JSON object:
 *
 *     rate         deliveries per second, from the first publish to the last delivery; publishes without subscribers
 *     p50_ms p99_ms        from publish to delivery
 *     ack_p50_ms ack_p99_ms   from publish to PUBACK
 *     ping_max_ms  longest answer to a PINGREQ of a separate connection, one every `ping_ms`
 *
 * With `hold=1` it prints the line and keeps all connections until its standard input ends.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { CONNACK = 2, PUBLISH = 3, PUBACK = 4, SUBACK = 9, PINGRESP = 13 };
enum { READ_BYTES = 256 << 10, CONNECTING_MAX = 200, EVENTS = 512, STEP_US = 50, STEPS = 400000 };

typedef struct {
    int fd, is_publisher, is_pinger, is_writing;
    unsigned char *in, *out;
    size_t in_bytes, in_room, out_bytes, out_room;
    uint64_t *sent_ns;      /* by packet identifier */
    long sent, acknowledged;
    unsigned number;
} Client;

static int port, epoll_fd, ready_count;
static long pubs = 1, subs = 1, count = 1000, size = 256, window = 20, qos = 0, is_clean = 1, retain = 0, hold = 0;
static long ping_ms = 0, expected = -1, leave = 0, idle = 0;
static const char *name = "load", *topic = "load/%ld", *filter = "load/%ld";
static long delivered, acknowledged, published;
static uint64_t last_delivery_ns, ping_sent_ns, ping_max_ns;
static uint32_t latency[STEPS + 1], ack_latency[STEPS + 1];
static unsigned char buffer[READ_BYTES], *payload;

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "mqtt_load: %s: %s\n", what, errno ? strerror(errno) : "unexpected");
    exit(1);
}

static void append(Client *c, const void *data, size_t bytes) {
    if (c->out_bytes + bytes > c->out_room) {
        c->out_room = (c->out_bytes + bytes) * 2;
        c->out = realloc(c->out, c->out_room);
    }
    memcpy(c->out + c->out_bytes, data, bytes);
    c->out_bytes += bytes;
}

static void watch(Client *c, int is_writing) {
    struct epoll_event event = {.events = EPOLLIN | (is_writing ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
    c->is_writing = is_writing;
}

static void flush(Client *c) {
    size_t done = 0;
    while (done < c->out_bytes) {
        ssize_t wrote = write(c->fd, c->out + done, c->out_bytes - done);
        if (wrote < 0) {
            if (errno == EAGAIN) break;
            fail("write");
        }
        done += (size_t)wrote;
    }
    c->out_bytes -= done;
    if (c->out_bytes) {
        memmove(c->out, c->out + done, c->out_bytes);
    } else if (c->out_room > 4096) {
        free(c->out);
        c->out = NULL;
        c->out_room = 0;
    }
    if (c->is_writing != (c->out_bytes > 0)) watch(c, c->out_bytes > 0);
}

static size_t head(unsigned char *to, int first, size_t length) {
    size_t at = 0;
    to[at++] = (unsigned char)first;
    do {
        to[at] = length & 127;
        length >>= 7;
        if (length) to[at] |= 128;
        at++;
    } while (length);
    return at;
}

static size_t text(unsigned char *to, const char *value) {
    size_t bytes = strlen(value);
    to[0] = (unsigned char)(bytes >> 8);
    to[1] = (unsigned char)bytes;
    memcpy(to + 2, value, bytes);
    return bytes + 2;
}

static void send_connect(Client *c) {
    unsigned char body[256], fixed[8];
    char id[128];
    snprintf(id, sizeof id, "%s-%s-%u", name, c->is_pinger ? "ping" : c->is_publisher ? "pub" : "sub", c->number);
    size_t at = text(body, "MQTT");
    body[at++] = 4;
    body[at++] = is_clean || c->is_publisher || c->is_pinger ? 2 : 0;
    body[at++] = 0;
    body[at++] = 0;
    at += text(body + at, id);
    append(c, fixed, head(fixed, 0x10, at));
    append(c, body, at);
}

static void send_subscribe(Client *c) {
    unsigned char body[512], fixed[8];
    char wanted[256];
    snprintf(wanted, sizeof wanted, filter, (long)c->number);
    body[0] = 0;
    body[1] = 1;
    size_t at = 2 + text(body + 2, wanted);
    body[at++] = (unsigned char)qos;
    append(c, fixed, head(fixed, 0x82, at));
    append(c, body, at);
}

static void send_publish(Client *c, uint64_t at_ns) {
    unsigned char body[512], fixed[8];
    char wanted[256];
    /* One topic per publisher, or per message if it is retained. */
    snprintf(wanted, sizeof wanted, topic, retain ? c->sent * pubs + (long)c->number : (long)c->number);
    size_t at = text(body, wanted);
    if (qos) {
        unsigned id = (unsigned)(c->sent % 65535) + 1;
        body[at++] = (unsigned char)(id >> 8);
        body[at++] = (unsigned char)id;
        c->sent_ns[id % (unsigned)window] = at_ns;
    }
    memcpy(payload, &at_ns, sizeof at_ns);
    append(c, fixed, head(fixed, 0x30 | (int)qos << 1 | (int)retain, at + (size_t)size));
    append(c, body, at);
    append(c, payload, (size_t)size);
    c->sent++;
    published++;
}

static void note(uint32_t *counts, uint64_t since_ns, uint64_t at_ns) {
    uint64_t step = (at_ns - since_ns) / (STEP_US * 1000);
    counts[step < STEPS ? step : STEPS]++;
}

static double quantile_ms(const uint32_t *counts, double part) {
    uint64_t total = 0, seen = 0;
    for (int at = 0; at <= STEPS; at++) total += counts[at];
    for (int at = 0; at <= STEPS; at++) {
        seen += counts[at];
        if (seen && seen >= (uint64_t)(part * (double)total)) return (at + 1) * STEP_US / 1000.0;
    }
    return 0;
}

static void handle(Client *c, int first, const unsigned char *body, size_t bytes, uint64_t at_ns) {
    uint64_t sent_ns;
    switch (first >> 4) {
    case CONNACK:
        if (bytes < 2 || body[1]) fail("refused by the broker");
        if (c->is_publisher || c->is_pinger || idle) ready_count++;
        else send_subscribe(c);
        break;
    case SUBACK:
        if (body[2] > 2) fail("the subscription was refused");
        ready_count++;
        if (leave) append(c, "\xe0\0", 2);
        break;
    case PUBLISH: {
        size_t skip = 2 + ((size_t)body[0] << 8 | body[1]);
        if (first & 6) {
            unsigned char answer[4] = {0x40, 2, body[skip], body[skip + 1]};
            append(c, answer, 4);
            skip += 2;
        }
        memcpy(&sent_ns, body + skip, sizeof sent_ns);
        note(latency, sent_ns, at_ns);
        delivered++;
        last_delivery_ns = at_ns;
        break;
    }
    case PUBACK: {
        unsigned id = (unsigned)body[0] << 8 | body[1];
        note(ack_latency, c->sent_ns[id % (unsigned)window], at_ns);
        c->acknowledged++;
        acknowledged++;
        break;
    }
    case PINGRESP:
        if (at_ns - ping_sent_ns > ping_max_ns) ping_max_ns = at_ns - ping_sent_ns;
        ping_sent_ns = 0;
        break;
    default:
        fail("packet type");
    }
}

static size_t parse(Client *c, const unsigned char *data, size_t bytes, uint64_t at_ns) {
    size_t at = 0;
    while (bytes - at >= 2) {
        size_t length = 0, used = at + 1;
        int shift = 0, is_whole = 0;
        while (used < bytes && shift < 28) {
            length |= (size_t)(data[used] & 127) << shift;
            shift += 7;
            if (!(data[used++] & 128)) {
                is_whole = 1;
                break;
            }
        }
        if (!is_whole || bytes - used < length) break;
        handle(c, data[at], data + used, length, at_ns);
        at = used + length;
    }
    return at;
}

static void receive(Client *c) {
    for (;;) {
        ssize_t got = read(c->fd, buffer + c->in_bytes, READ_BYTES - c->in_bytes);
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            if (leave && !c->is_publisher) {
                epoll_ctl(epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
                close(c->fd);
                c->fd = -1;
                return;
            }
            errno = got ? errno : ECONNRESET;
            fail("the broker closed a connection");
        }
        int is_last = (size_t)got < READ_BYTES - c->in_bytes;
        if (c->in_bytes) memcpy(buffer, c->in, c->in_bytes);
        size_t bytes = c->in_bytes + (size_t)got, used = parse(c, buffer, bytes, now_ns());
        c->in_bytes = bytes - used;
        if (c->in_bytes) {
            if (c->in_room < c->in_bytes) c->in = realloc(c->in, c->in_room = c->in_bytes);
            memcpy(c->in, buffer + used, c->in_bytes);
        }
        if (is_last) break;
    }
}

static void turn(int wait_ms) {
    struct epoll_event events[EVENTS];
    int found = epoll_wait(epoll_fd, events, EVENTS, wait_ms);
    for (int at = 0; at < found; at++) {
        Client *c = events[at].data.ptr;
        if (events[at].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
        if (c->fd >= 0 && (c->out_bytes || c->is_writing)) flush(c);
    }
}

static void join(Client *clients, long many, int is_publisher, int is_pinger) {
    ready_count = 0;
    for (long at = 0; at < many || ready_count < many;) {
        if (at < many && at - ready_count < CONNECTING_MAX) {
            Client *c = &clients[at];
            struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
            int one = 1;
            memset(c, 0, sizeof *c);
            c->number = (unsigned)at++;
            c->is_publisher = is_publisher;
            c->is_pinger = is_pinger;
            if (is_publisher) c->sent_ns = calloc((size_t)window, sizeof *c->sent_ns);
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            c->fd = socket(AF_INET, SOCK_STREAM, 0);
            if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
            setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            fcntl(c->fd, F_SETFL, O_NONBLOCK);
            struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
            epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
            send_connect(c);
            flush(c);
        }
        turn(at < many && at - ready_count < CONNECTING_MAX ? 0 : 1000);
    }
}

static int may_send(const Client *c, long per_message) {
    if (c->sent >= count) return 0;
    if (qos || !per_message) return c->sent - c->acknowledged < window || !qos;
    return published - delivered / per_message < window * pubs;
}

static void option(char *given) {
    static const struct { const char *name; long *value; } NUMBERS[] = {
        {"pubs", &pubs}, {"subs", &subs}, {"count", &count}, {"size", &size}, {"window", &window}, {"qos", &qos},
        {"clean", &is_clean}, {"retain", &retain}, {"hold", &hold}, {"ping_ms", &ping_ms}, {"expected", &expected},
        {"leave", &leave}, {"idle", &idle},
    };
    char *value = strchr(given, '=');
    if (!value) fail(given);
    *value++ = 0;
    if (!strcmp(given, "name")) name = value;
    else if (!strcmp(given, "topic")) topic = value;
    else if (!strcmp(given, "filter")) filter = value;
    else {
        for (size_t at = 0; at < sizeof NUMBERS / sizeof *NUMBERS; at++)
            if (!strcmp(given, NUMBERS[at].name)) {
                *NUMBERS[at].value = atol(value);
                return;
            }
        fail(given);
    }
}

int main(int argc, char **argv) {
    struct rlimit files;
    if (argc < 2) fail("usage: mqtt_load PORT NAME=VALUE...");
    port = atoi(argv[1]);
    for (int at = 2; at < argc; at++) option(argv[at]);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    epoll_fd = epoll_create1(0);
    if (size < 8) size = 8;
    payload = calloc(1, (size_t)size);
    Client *publishers = calloc((size_t)pubs + 1, sizeof *publishers);
    Client *subscribers = calloc((size_t)subs + 1, sizeof *subscribers), pinger;
    if (ping_ms) join(&pinger, 1, 0, 1);
    uint64_t begin_ns = now_ns();
    join(subscribers, subs, 0, 0);
    join(publishers, pubs, 1, 0);
    if (expected < 0) expected = pubs * count * (subs && pubs ? (subs > pubs ? subs / pubs : 1) : 0);
    long per_message = pubs && count ? expected / (pubs * count) : 0;
    if (pubs) begin_ns = now_ns();
    uint64_t next_ping_ns = 0;
    while (!leave && (published < pubs * count || (qos && acknowledged < published) || delivered < expected)) {
        uint64_t at_ns = now_ns();
        if (ping_ms && !ping_sent_ns && at_ns >= next_ping_ns) {
            ping_sent_ns = at_ns;
            next_ping_ns = at_ns + (uint64_t)ping_ms * 1000000u;
            append(&pinger, "\xc0\0", 2);
            flush(&pinger);
        }
        int is_open = 0;
        for (long at = 0; at < pubs; at++) {
            Client *c = &publishers[at];
            int burst = 0;
            if (c->is_writing) continue;
            while (may_send(c, per_message) && burst++ < 64) send_publish(c, at_ns);
            if (c->out_bytes) flush(c);
            is_open |= !c->is_writing && may_send(c, per_message);
        }
        turn(is_open ? 0 : ping_ms ? 1 : 1000);
    }
    uint64_t end_ns = expected && !leave ? last_delivery_ns : now_ns();
    double seconds = (double)(end_ns - begin_ns) / 1e9;
    long done = expected ? delivered : published;
    printf("{\"rate\": %.1f, \"delivered\": %ld, \"acknowledged\": %ld, \"seconds\": %.3f, "
           "\"p50_ms\": %.2f, \"p99_ms\": %.2f, \"ack_p50_ms\": %.2f, \"ack_p99_ms\": %.2f, \"ping_max_ms\": %.2f}\n",
           (double)done / seconds, delivered, acknowledged, seconds,
           quantile_ms(latency, .5), quantile_ms(latency, .99), quantile_ms(ack_latency, .5),
           quantile_ms(ack_latency, .99), (double)ping_max_ns / 1e6);
    fflush(stdout);
    while (hold && read(0, buffer, 1) > 0) {}
    return 0;
}
