import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

/**
 * Sends, receives and acknowledges messages with RocketMQ's Java client: Load PORT TOPIC PRODUCERS COUNT GROUPS RATE.
 *
 * <p>PRODUCERS threads send COUNT messages of 1 KiB, each after the answer to the one before. With GROUPS above 0 they
 * are FIFO messages of so many message groups, and the order of each is checked. With RATE above 0 they are sent at so
 * many per second, and the time from when a message was due to its receipt is measured. Prints "rate p50_us p99_us".
 */
public class Load {
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    static final int BODY = 1024;
    static final int RECEIVERS = 4;
    static final int ACKS = 256;
    static final String NUMBER = "n";

    public static void main(String[] given) throws Exception {
        String topic = given[1];
        int producers = Integer.parseInt(given[2]);
        int count = Integer.parseInt(given[3]);
        int groups = Integer.parseInt(given[4]);
        int rate = Integer.parseInt(given[5]);
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
            .setEndpoints("127.0.0.1:" + given[0]).enableSsl(false).setRequestTimeout(Duration.ofSeconds(30)).build();
        Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic).build();
        SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup("group-" + topic)
            .setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL))
            .build();
        AtomicInteger acknowledged = new AtomicInteger();
        AtomicInteger next = new AtomicInteger();
        AtomicLong disorder = new AtomicLong();
        Semaphore acks = new Semaphore(ACKS);
        Map<String, Integer> last = new ConcurrentHashMap<>();
        long[] latencies = new long[count];
        byte[] body = new byte[BODY];
        Arrays.fill(body, (byte) 'x');
        long begin = System.nanoTime();
        List<Thread> threads = new ArrayList<>();
        for (int at = 0; at < RECEIVERS; at++) {
            threads.add(start(() -> {
                while (acknowledged.get() < count) {
                    for (MessageView view : consumer.receive(32, Duration.ofSeconds(60))) {
                        int number = Integer.parseInt(view.getProperties().get(NUMBER));
                        latencies[number] = System.nanoTime() - begin - (rate == 0 ? 0 : number * 1_000_000_000L / rate);
                        view.getMessageGroup().ifPresent(group -> {
                            Integer before = last.put(group, number);
                            if (before != null && before >= number) {
                                disorder.incrementAndGet();
                            }
                        });
                        acks.acquire();
                        consumer.ackAsync(view).whenComplete((done, error) -> {
                            acks.release();
                            if (error == null) {
                                acknowledged.incrementAndGet();
                            } else {
                                error.printStackTrace();
                            }
                        });
                    }
                }
            }));
        }
        for (int at = 0; at < producers; at++) {
            int mine = at;
            threads.add(start(() -> {
                // The messages of a message group are sent by one thread, in order.
                for (int number = mine; number < count; number += producers) {
                    if (rate > 0) {
                        long wait = number * 1_000_000_000L / rate - (System.nanoTime() - begin);
                        if (wait > 0) {
                            Thread.sleep(wait / 1_000_000, (int) (wait % 1_000_000));
                        }
                    }
                    MessageBuilder message = PROVIDER.newMessageBuilder().setTopic(topic).setBody(body)
                        .addProperty(NUMBER, Integer.toString(number));
                    if (groups > 0) {
                        int rounded = groups - groups % producers;
                        message.setMessageGroup("g" + number % Math.max(rounded, producers));
                    }
                    producer.send(message.build());
                }
            }));
        }
        for (Thread thread : threads) {
            thread.join();
        }
        double seconds = (System.nanoTime() - begin) / 1e9;
        Arrays.sort(latencies);
        System.out.printf("%.1f %d %d %d%n", count / seconds, latencies[count / 2] / 1000,
            latencies[(int) (count * 0.99)] / 1000, disorder.get());
        System.exit(disorder.get() == 0 ? 0 : 1);
    }

    interface Work {
        void run() throws Exception;
    }

    static Thread start(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (Exception error) {
                error.printStackTrace();
                System.exit(2);
            }
        });
        thread.start();
        return thread;
    }
}
