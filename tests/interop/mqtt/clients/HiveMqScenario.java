import com.hivemq.client.mqtt.MqttClientSslConfig;
import com.hivemq.client.mqtt.MqttGlobalPublishFilter;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.mqtt5.Mqtt5BlockingClient;
import com.hivemq.client.mqtt.mqtt5.Mqtt5Client;
import com.hivemq.client.mqtt.mqtt5.message.connect.Mqtt5Connect;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5Publish;
import java.io.FileInputStream;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.TrustManagerFactory;

/**
 * The scenario for HiveMQ's client over TLS: every QoS, properties, a retained message, a resumed session.
 *
 * <p>Arguments: the port, and the certificate of the authority.
 */
public final class HiveMqScenario {
    private static final long WAIT_S = 20;
    private static final String NAME = "hivemq";

    public static void main(String[] arguments) {
        try {
            run(arguments);
            System.out.println("passed");
            System.exit(0);
        } catch (Throwable error) {
            // The threads of the client would keep the process alive.
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void run(String[] arguments) throws Exception {
        int port = Integer.parseInt(arguments[0]);
        MqttClientSslConfig tls = MqttClientSslConfig.builder().trustManagerFactory(trusting(arguments[1])).build();
        Mqtt5BlockingClient first = client(port, tls, NAME);
        Mqtt5BlockingClient other = client(port, tls, NAME + "-other");
        Mqtt5Connect durable = Mqtt5Connect.builder().cleanStart(false).sessionExpiryInterval(300).build();

        BlockingQueue<Mqtt5Publish> messages = new LinkedBlockingQueue<>();
        first.toAsync().publishes(MqttGlobalPublishFilter.ALL, messages::add);
        check(!first.connect(durable).isSessionPresent(), "the session exists already");
        first.subscribeWith().topicFilter(NAME + "/#").qos(MqttQos.EXACTLY_ONCE).send();
        other.connect();
        for (MqttQos qos : MqttQos.values()) {
            other.publish(message(NAME + "/" + qos.getCode(), qos));
            Mqtt5Publish received = next(messages);
            check(received.getQos() == qos, "QoS " + qos + " came as " + received.getQos());
            check(received.getTopic().toString().equals(NAME + "/" + qos.getCode()), "topic " + received.getTopic());
            check(received.getContentType().get().toString().equals("text/plain"), "content type");
            check(received.getResponseTopic().get().toString().equals("answers"), "response topic");
            check(received.getCorrelationData().get().equals(ByteBuffer.wrap("17".getBytes())), "correlation data");
            check(received.getUserProperties().asList().size() == 1, "user properties");
        }
        other.publishWith().topic(NAME + "-kept").payload("kept".getBytes()).qos(MqttQos.AT_LEAST_ONCE).retain(true).send();
        first.subscribeWith().topicFilter(NAME + "-kept").qos(MqttQos.AT_LEAST_ONCE).send();
        check(next(messages).isRetain(), "the retained message has no retain flag");
        first.disconnect();
        other.publish(message(NAME + "/offline", MqttQos.AT_LEAST_ONCE));
        check(first.connect(durable).isSessionPresent(), "the session was lost");
        check(next(messages).getTopic().toString().equals(NAME + "/offline"), "the offline message is missing");
        first.disconnect();
        other.disconnect();
    }

    private static Mqtt5BlockingClient client(int port, MqttClientSslConfig tls, String name) {
        return Mqtt5Client.builder()
                .identifier(name)
                .serverHost("127.0.0.1")
                .serverPort(port)
                .sslConfig(tls)
                .buildBlocking();
    }

    private static Mqtt5Publish message(String topic, MqttQos qos) {
        return Mqtt5Publish.builder()
                .topic(topic)
                .qos(qos)
                .payload("payload".getBytes())
                .contentType("text/plain")
                .responseTopic("answers")
                .correlationData("17".getBytes())
                .userProperties()
                .add("unit", "K")
                .applyUserProperties()
                .build();
    }

    private static Mqtt5Publish next(BlockingQueue<Mqtt5Publish> messages) throws InterruptedException {
        Mqtt5Publish found = messages.poll(WAIT_S, TimeUnit.SECONDS);
        check(found != null, "no message arrived");
        return found;
    }

    private static void check(boolean condition, String what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }

    private static TrustManagerFactory trusting(String authority) throws Exception {
        KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
        store.load(null);
        try (InputStream file = new FileInputStream(authority)) {
            store.setCertificateEntry("authority", CertificateFactory.getInstance("X.509").generateCertificate(file));
        }
        TrustManagerFactory factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        factory.init(store);
        return factory;
    }
}
