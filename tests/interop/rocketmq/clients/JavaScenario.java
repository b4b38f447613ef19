import java.time.Duration;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.LitePushConsumer;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** RocketMQ's Java client against a broker: JavaScenario PORT tls|plain [half|check]. */
public class JavaScenario {
    static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    static MessageBuilder message(String topic, String body) {
        return PROVIDER.newMessageBuilder().setTopic(topic).setBody(body.getBytes(StandardCharsets.UTF_8));
    }

    static String text(MessageView view) {
        ByteBuffer body = view.getBody();
        byte[] raw = new byte[body.remaining()];
        body.get(raw);
        return new String(raw, StandardCharsets.UTF_8);
    }

    static List<String> received(SimpleConsumer consumer, int wanted) throws Exception {
        List<String> found = new ArrayList<>();
        while (found.size() < wanted) {
            for (MessageView view : consumer.receive(16, Duration.ofSeconds(30))) {
                found.add(text(view));
                consumer.ack(view);
            }
        }
        return found;
    }

    /** Leaves a half message behind, or decides on one that another producer has left. */
    static void transaction(ClientConfiguration configuration, String part) throws Exception {
        String topic = "java-transactions";
        Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration)
            .setTopics(topic)
            .setTransactionChecker(view -> {
                System.out.println("checked " + text(view));
                return TransactionResolution.COMMIT;
            })
            .build();
        if (part.equals("half")) {
            producer.send(message(topic, "left behind").build(), producer.beginTransaction());
            System.out.println("half");
            Runtime.getRuntime().halt(137);
        }
        SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup("java-transactions")
            .setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL))
            .build();
        System.out.println("received " + received(consumer, 1));
        System.exit(0);
    }

    public static void main(String[] arguments) throws Exception {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder().setEndpoints("127.0.0.1:" + arguments[0]);
        ClientConfiguration configuration = builder.enableSsl(arguments[1].equals("tls")).build();
        if (arguments.length > 2) {
            transaction(configuration, arguments[2]);
        }
        String topic = "java-" + arguments[1];
        Producer producer = PROVIDER.newProducerBuilder()
            .setClientConfiguration(configuration)
            .setTopics(topic)
            .setTransactionChecker(view -> TransactionResolution.COMMIT)
            .build();
        producer.send(message(topic, "normal").setTag("t").setKeys("k").addProperty("number", "7").build());
        for (int number = 0; number < 3; number++) {
            producer.send(message(topic, "fifo " + number).setMessageGroup("group").build());
        }
        long due = System.currentTimeMillis() + 1000;
        producer.send(message(topic, "delayed").setDeliveryTimestamp(due).build());
        Transaction transaction = producer.beginTransaction();
        producer.send(message(topic, "transaction").build(), transaction);
        transaction.commit();

        SimpleConsumer consumer = PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup("java-simple-" + arguments[1])
            .setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL))
            .build();
        List<String> found = received(consumer, 6);
        Collections.sort(found);
        System.out.println(found);
        consumer.close();

        CountDownLatch latch = new CountDownLatch(1);
        FilterExpression filter = new FilterExpression("number > 5", FilterExpressionType.SQL92);
        PushConsumer push = PROVIDER.newPushConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup("java-push-" + arguments[1])
            .setSubscriptionExpressions(Collections.singletonMap(topic, filter))
            .setMessageListener(view -> {
                System.out.println("pushed " + text(view) + " " + view.getTag().get() + " " + view.getKeys());
                latch.countDown();
                return ConsumeResult.SUCCESS;
            })
            .build();
        System.out.println(latch.await(60, TimeUnit.SECONDS));

        CountDownLatch lites = new CountDownLatch(3);
        List<String> inOrder = Collections.synchronizedList(new ArrayList<>());
        LitePushConsumer lite = PROVIDER.newLitePushConsumerBuilder()
            .setClientConfiguration(configuration)
            .setConsumerGroup("java-lite-" + arguments[1])
            .bindTopic(topic)
            .setMessageListener(view -> {
                inOrder.add(view.getLiteTopic().get() + " " + text(view));
                lites.countDown();
                return ConsumeResult.SUCCESS;
            })
            .build();
        lite.subscribeLite("room");
        for (int number = 0; number < 3; number++) {
            producer.send(message(topic, "lite " + number).setLiteTopic("room").build());
        }
        System.out.println(lites.await(60, TimeUnit.SECONDS) + " " + inOrder);
        System.exit(0);
    }
}
