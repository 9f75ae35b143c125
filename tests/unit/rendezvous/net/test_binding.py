"""Which endpoints this machine may serve, and how widely it then listens."""

from __future__ import annotations

import errno
import socket

import pytest

from elasticlib.errors import ConfigError
from elasticlib.rendezvous.net import _binding
from elasticlib.rendezvous.net._binding import Elsewhere, Taken, bind_endpoint
from elasticlib.rendezvous.net._resolver import Address

FAR = Address(socket.AF_INET, "192.0.2.7")
V4 = Address(socket.AF_INET, "127.0.0.1")
V6 = Address(socket.AF_INET6, "::1")
DEBIAN = Address(socket.AF_INET, "127.0.1.1")


def bound_to(outcome: socket.socket | Elsewhere | Taken) -> str:
    assert isinstance(outcome, socket.socket), outcome
    with outcome:
        return str(outcome.getsockname()[0])


@pytest.mark.parametrize("address", [V4, V6, DEBIAN])
def test_a_literal_address_is_bound_alone(address: Address) -> None:
    assert address.host == bound_to(bind_endpoint(address.host, 0, [address]))


def test_localhost_is_bound_to_loopback_alone() -> None:
    assert "127.0.0.1" == bound_to(bind_endpoint("localhost", 0, [V4, V6]))


def test_a_literal_address_of_another_machine_is_elsewhere() -> None:
    outcome = bind_endpoint(FAR.host, 0, [FAR])

    assert isinstance(outcome, Elsewhere)
    assert "192.0.2.7 is not an address of this machine" in outcome.why


def test_bind_reports_an_endpoint_that_is_already_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        outcome = bind_endpoint("localhost", port, [V4, V6])

    assert Taken(f"another process already listens on 127.0.0.1:{port} of this machine") == outcome


@pytest.mark.parametrize(
    "host", [socket.gethostname(), f"{socket.gethostname()}.example", socket.gethostname().upper()]
)
def test_our_own_name_in_the_hosts_file_means_all_interfaces(host: str) -> None:
    assert bound_to(bind_endpoint(host, 0, [DEBIAN])) in ("::", "0.0.0.0")


def test_a_job_alone_on_its_node_listens_no_wider_than_the_name_leads() -> None:
    outcome = bind_endpoint(socket.gethostname(), 0, [DEBIAN], alone=True)
    assert isinstance(outcome, socket.socket)
    with outcome:
        address, port = outcome.getsockname()

        again = bind_endpoint(socket.gethostname(), port, [DEBIAN], alone=True)

    assert ("127.0.1.1", Taken(f"another process already listens on 127.0.1.1:{port} of this machine")) == (
        address,
        again,
    )


def test_another_name_that_leads_to_loopback_is_elsewhere() -> None:
    outcome = bind_endpoint("other-node", 0, [DEBIAN])

    assert isinstance(outcome, Elsewhere)
    assert "other-node resolves to 127.0.1.1 here" in outcome.why


def test_a_name_alone_makes_nobody_the_host() -> None:
    outcome = bind_endpoint(socket.gethostname(), 0, [FAR])

    assert isinstance(outcome, Elsewhere)


class TestWithOuterAddresses:
    """Loopback addresses stand for those of a network here: the tests' machine may have no other."""

    @pytest.fixture(autouse=True)
    def loopback_is_a_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_binding, "is_loopback", lambda host: False)

    def test_a_name_with_one_address_is_bound_to_it(self) -> None:
        assert "127.0.1.1" == bound_to(bind_endpoint("node1", 0, [DEBIAN]))

    def test_a_name_with_several_of_our_addresses_means_all_interfaces(self) -> None:
        assert bound_to(bind_endpoint("node1", 0, [V4, DEBIAN])) in ("::", "0.0.0.0")

    def test_a_job_alone_on_its_node_takes_the_first_of_them(self) -> None:
        assert "127.0.1.1" == bound_to(bind_endpoint("node1", 0, [DEBIAN, V4], alone=True))

    def test_of_a_name_for_many_machines_the_lowest_address_hosts(self) -> None:
        assert "127.0.0.1" == bound_to(bind_endpoint("service", 0, [FAR, V4]))

    def test_of_a_name_for_many_machines_another_address_does_not_host(self) -> None:
        lower = Address(socket.AF_INET, "10.255.255.254")

        outcome = bind_endpoint("service", 0, [V4, lower])

        assert isinstance(outcome, Elsewhere)
        assert "names several machines" in outcome.why


def test_all_interfaces_answer_in_both_families() -> None:
    listener = _binding.listen(_binding.ANYWHERE, 0)
    assert isinstance(listener, socket.socket)
    with listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1") if listener.family == socket.AF_INET6 else ("127.0.0.1",):
            socket.create_connection((host, port), 5).close()


def test_without_ipv6_the_other_family_does(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _binding._listen

    def without_ipv6(address: Address, port: int) -> socket.socket:
        if address.family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return real(address, port)

    monkeypatch.setattr(_binding, "_listen", without_ipv6)

    assert "0.0.0.0" == bound_to(_binding.listen(_binding.ANYWHERE, 0))


def test_a_forbidden_port_is_the_callers_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(address: Address, port: int) -> socket.socket:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(_binding, "_listen", forbidden)

    with pytest.raises(ConfigError, match=r"127.0.0.1:80: Permission denied; choose a port above 1023"):
        bind_endpoint("localhost", 80, [V4])
