/* Starts HiveMQ CE inside this process and lets every client in.
 *
 *     java -cp "JARS/*" HiveMq.java CONFIGURATION DATA EXTENSIONS
 */
import com.hivemq.embedded.EmbeddedExtension;
import com.hivemq.embedded.EmbeddedHiveMQ;
import com.hivemq.extension.sdk.api.ExtensionMain;
import com.hivemq.extension.sdk.api.auth.SimpleAuthenticator;
import com.hivemq.extension.sdk.api.parameter.*;
import com.hivemq.extension.sdk.api.services.Services;
import java.nio.file.Path;

public class HiveMq {
    static class AllowAll implements ExtensionMain {
        public void extensionStart(ExtensionStartInput in, ExtensionStartOutput out) {
            SimpleAuthenticator allow = (given, answer) -> answer.authenticateSuccessfully();
            Services.securityRegistry().setAuthenticatorProvider(given -> allow);
        }
        public void extensionStop(ExtensionStopInput in, ExtensionStopOutput out) {}
    }

    public static void main(String[] folders) throws Exception {
        var allow = EmbeddedExtension.builder().withId("allow-all").withName("allow-all").withVersion("1")
            .withExtensionMain(new AllowAll()).build();
        EmbeddedHiveMQ.builder().withConfigurationFolder(Path.of(folders[0])).withDataFolder(Path.of(folders[1]))
            .withExtensionsFolder(Path.of(folders[2])).withEmbeddedExtension(allow).build().start().join();
        Thread.currentThread().join();
    }
}
