// qpid-jms: client ids, subscriptions that several consumers share, destinations of each message, SASL. Prints what it saw.
import jakarta.jms.*;
import org.apache.qpid.jms.*;
public class JmsSubscriptions {
  static String url;
  static void say(String s) { System.out.println(s); }
  static Connection connect(String id) throws Exception { return connect(id, "guest", "guest", "?amqp.saslMechanisms=PLAIN"); }
  static Connection connect(String id, String user, String password, String options) throws Exception {
    JmsConnectionFactory f = new JmsConnectionFactory(user, password, url + options);
    Connection c = f.createConnection();
    if (id != null) c.setClientID(id);
    c.start();
    return c;
  }
  static String text(MessageConsumer c, long ms) throws Exception {
    TextMessage m = (TextMessage) c.receive(ms);
    return m == null ? "nothing" : m.getText();
  }
  // The broker has handled what these sessions have sent, such as the credit of their consumers.
  static void answered(Session... sessions) throws Exception {
    for (Session s : sessions) s.createTemporaryQueue().delete();
  }
  interface Step { void run() throws Exception; }
  static String fails(Step step) {
    try { step.run(); return "BAD"; } catch (Exception e) { return e.getClass().getSimpleName(); }
  }
  public static void main(String[] a) {
    try { all(a); System.exit(0); } catch (Throwable e) { e.printStackTrace(); System.exit(1); }
  }
  static void all(String[] a) throws Exception {
    url = "amqp://127.0.0.1:" + a[0];
    Connection c = connect("subscriptions");
    say("same client id " + fails(() -> connect("subscriptions")));
    Session s = c.createSession(false, Session.CLIENT_ACKNOWLEDGE);
    Topic t = s.createTopic("sub.news");
    MessageProducer any = s.createProducer(null);

    // Two consumers share a durable subscription. One leaves without an acknowledgement; the other gets its message.
    Session s2 = c.createSession(false, Session.CLIENT_ACKNOWLEDGE);
    MessageConsumer one = s.createSharedDurableConsumer(t, "team", "n > 0"), two = s2.createSharedDurableConsumer(t, "team", "n > 0");
    answered(s, s2);
    for (int i = 0; i < 3; i++) { TextMessage m = s.createTextMessage("m" + i); m.setIntProperty("n", i); any.send(t, m); }
    String got = text(one, 10000); String other = text(two, 10000);
    say("shared " + (got.compareTo(other) < 0 ? got + other : other + got));
    say("other selector " + fails(() -> s.createSharedDurableConsumer(t, "team", "n > 1")));
    say("in use " + fails(() -> s.unsubscribe("team")));
    s2.close();
    say("again " + text(one, 10000).equals(other));
    one.close();
    MessageConsumer changed = s.createSharedDurableConsumer(t, "team", "n > 5");
    say("changed " + text(changed, 300));
    changed.close(); s.unsubscribe("team");
    say("gone " + fails(() -> s.unsubscribe("team")));

    // Without a client id a shared subscription belongs to all clients.
    Connection g1 = connect(null), g2 = connect(null);
    Session gs1 = g1.createSession(false, Session.AUTO_ACKNOWLEDGE), gs2 = g2.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageConsumer gc1 = gs1.createSharedDurableConsumer(t, "all"), gc2 = gs2.createSharedDurableConsumer(t, "all");
    answered(gs1, gs2);
    any.send(t, s.createTextMessage("x")); any.send(t, s.createTextMessage("y"));
    String x = text(gc1, 10000), y = text(gc2, 10000);
    say("global " + (x.compareTo(y) < 0 ? x + y : y + x));
    gc1.close(); gc2.close();
    any.send(t, s.createTextMessage("kept"));
    MessageConsumer gc3 = gs1.createSharedDurableConsumer(t, "all");
    say("global " + text(gc3, 10000)); gc3.close(); gs1.unsubscribe("all");
    MessageConsumer v1 = gs1.createSharedConsumer(t, "volatile"), v2 = gs2.createSharedConsumer(t, "volatile");
    answered(gs1, gs2);
    say("other topic " + fails(() -> gs1.createSharedConsumer(gs1.createTopic("sub.other"), "volatile")));
    any.send(t, s.createTextMessage("v")); any.send(t, s.createTextMessage("w"));
    x = text(v1, 10000); y = text(v2, 10000);
    say("volatile " + (x.compareTo(y) < 0 ? x + y : y + x));
    g1.close(); g2.close();

    // A changed selector replaces an unshared durable subscription, and its messages are gone.
    Session auto = c.createSession(false, Session.AUTO_ACKNOWLEDGE);
    MessageConsumer d = auto.createDurableSubscriber(t, "mine", "n = 1", false); d.close();
    TextMessage m = s.createTextMessage("old"); m.setIntProperty("n", 1); any.send(t, m);
    d = auto.createDurableSubscriber(t, "mine", "n = 2", false);
    m = s.createTextMessage("new"); m.setIntProperty("n", 2); any.send(t, m);
    say("replaced " + text(d, 10000)); d.close(); s.unsubscribe("mine");

    // Each message names its destination. A topic needs no subscriber, a queue must exist.
    any.send(s.createTopic("sub.nobody"), s.createTextMessage("unheard"));
    TemporaryQueue q = s.createTemporaryQueue(); MessageConsumer qc = s.createConsumer(q);
    any.send(q, s.createTextMessage("to a queue")); say(text(qc, 10000));
    say("no queue " + fails(() -> any.send(s.createQueue("sub.missing"), s.createTextMessage("lost"))));
    any.setTimeToLive(50); any.send(q, s.createTextMessage("short")); any.setTimeToLive(0);
    qc.close(); Thread.sleep(200);
    qc = s.createConsumer(q); say("expired " + text(qc, 300)); qc.close();

    for (String mechanism : new String[] {"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "ANONYMOUS"}) {
      Connection l = connect(null, "jms-scram", "secret", "?amqp.saslMechanisms=" + mechanism);
      l.createSession(false, Session.AUTO_ACKNOWLEDGE).createTemporaryQueue(); l.close(); say(mechanism);
    }
    say("wrong password " + fails(() -> connect(null, "jms-scram", "wrong", "?amqp.saslMechanisms=SCRAM-SHA-256")));
    c.close(); say("closed");
  }
}
